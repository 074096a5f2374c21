"""The training loop, and what all systems to train have in common.

system             the interface of a system to train: a model, its loss and its data
loop               the training loop, with checkpoints
time_limit         the number of steps that fit into a time
hooks              progress, checkpoints and stop requests of a run
stepping           steps by torch, or by DeepSpeed's ZeRO
parameter_groups   groups of parameters with their own settings
adafactor          Adafactor as T5X has it
training_data      batches of queries with positives and negatives
mixture_sets       training on several training sets
mixture_schedule   which queries each batch holds
dev                quality on a dev split during training
dev_workers        forward passes of a dev split, shared by the workers
"""
