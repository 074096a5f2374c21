"""Systems to train: the dual encoder, the cross-encoder, and intermediate pretraining.

dual           the dual encoder: prompts, an adapter, or the whole backbone
encoders       the encoders that it trains: opened for training, and saved
prompt_kinds   the kinds of prompts that it trains
text_chunks    the texts of a batch, cut into chunks
lora           LoRA adapters through PEFT: added, saved in its format, merged
cross          the cross-encoder
rip            RIP, coCondenser and Condenser
masking        masked language modelling
condenser      Condenser's head
sentences      texts to sentences or random spans

PEFT is imported when an adapter is made or opened.
"""
