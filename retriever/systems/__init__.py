"""Systems to train: the dual encoder, the cross-encoder, and intermediate pretraining.

dual           the dual encoder: prompts, an adapter, or the whole backbone
encoders       opens the encoders of a dual system for training, and saves them
prompt_kinds   the kinds of trained prompts
text_chunks    splits the texts of a batch into chunks
lora           adds LoRA adapters with PEFT, saves and merges them
cross          the cross-encoder
rip            RIP, coCondenser and Condenser
masking        masked language modelling
condenser      Condenser's head
sentences      splits texts into sentences or random spans

PEFT is imported when an adapter is made or opened.
"""
