"""Reads prompts that other tools trained and writes prompts for them; pickle files may contain only tensors.

backbone            the backbone that a prompt must fit
prefix_rows         the layout that the other tools share: one row per token with the keys and values of all layers
state_dicts         files with tensors by name: safetensors, or torch's state dicts
dptdr               checkpoints of DPTDR's authors
prefix_tuning       folders of PEFT's prefix tuning
prompt_conversion   converts files of either kind to a TaskPrompt, and a TaskPrompt to PEFT's folders
"""
