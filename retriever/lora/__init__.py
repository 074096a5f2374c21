"""LoRA (Hu et al. 2021): trained low-rank changes of some linear layers of a frozen backbone, through PEFT.

options   the options of an adapter
adapter   adds an adapter to a backbone, saves it in PEFT's format, and merges it into the weights

PEFT is imported when an adapter is made or opened; importing these modules does not need it.
"""
