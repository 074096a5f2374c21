"""The forward pass: batches, attention with prompts, pooling, and CPU kernels.

batching      texts to token ids, and batches of similar length
prompt_rows   the prompts of a batch, and the interface of their providers
attention     attention with the keys and values of a prompt
pooling       token vectors to one vector per text, and the head after pooling
packing       unpadded (packed) batches on a CPU (packing_kernel.cpp, vectors.h)
int8          BERT layers in 8-bit integers on a CPU (int8_kernel.cpp, vectors.h)
kernels       CPU kernels for training: attention, dropout, cross-entropy over the vocabulary
numerics      the numerics class of vectors
compiling     compilation with torch.compile
"""
