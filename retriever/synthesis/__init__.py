"""Prompts that are computed from each query (HYPER).

options         numbers and lengths of the basic prompts, sizes of the networks, and the weight of the regulariser
words           the words of texts, and the maximum of their embeddings
synthesiser     the network that mixes basic prompts by the words of a query, for training and for serving
provider        the synthesiser as a provider of prompts in the training loop
task_prompts    a baseline: a prompt for each task, computed by the same prefix encoder
divergence      the regulariser: queries of one task have similar mixtures, queries of different tasks different ones
saved           the saved form of a synthesiser
"""
