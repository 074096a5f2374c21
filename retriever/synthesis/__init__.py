"""Prompts that are computed from each query (HYPER).

options         numbers and lengths of the basic prompts, sizes of the networks, and the weight of the regulariser
synthesiser     the network that mixes basic prompts by the words of a query
divergence      the regulariser: queries of one task have similar mixtures, queries of different tasks different ones
"""
