"""Deep prompts: parameters, files, prompts of many tasks in one batch, and prompts computed from a query (HYPER).

task_prompt          saved prompts, and their folders
deep_prompt          a prompt in training that is the same for all texts
prompt_table         prompts of many tasks in one batch
query_words          the words of texts, and the element-wise maximum of their embeddings
synthesiser          the network that mixes basic prompts by the words of a query
synthesis_provider   the synthesiser as a provider of prompts in training
task_prompts         a baseline: one prompt per task, computed by a shared prefix encoder
saved_synthesis      the saved form of a synthesiser
"""
