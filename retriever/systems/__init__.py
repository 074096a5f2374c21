"""Systems to train: the dual encoder, the cross-encoder, and intermediate pretraining.

dual        the dual encoder: prompts, an adapter, or the whole backbone
lora        LoRA adapters through PEFT: added, saved in its format, merged
cross       the cross-encoder
rip         RIP, coCondenser and Condenser
masking     masked language modelling
condenser   Condenser's head
sentences   texts to sentences or random spans

PEFT is imported when an adapter is made or opened.
"""
