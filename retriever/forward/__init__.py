"""The forward pass: batches, attention with prompts, pooling, and CPU kernels.

batching      texts to token ids, and batches of similar length
prompt_rows   what a forward pass takes of prompts
attention     attention with the keys and values of a prompt
pooling       token vectors to a text's vector, and the heads above
packing       unpadded (packed) batches on a CPU (packing_kernel.cpp)
kernels       training kernels for a CPU: attention, dropout, the loss over the vocabulary
numerics      the numerics class of vectors
compiling     torch's compiler
"""
