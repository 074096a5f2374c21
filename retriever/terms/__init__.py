"""Terms of the loss of a dual encoder: what each adds to a batch, and its value.

term         the interface of a term, and the batch of a step while terms add to it
registry     the terms in the order in which they are added up
pairs        judged pairs: contrastive losses and distillation
categories   positives with a common category (Topic-DPR)
topics       passages under the prompts of several topics (Topic-DPR)
divergence   the regulariser of computed prompts (HYPER)
flops        the regulariser of sparse vectors (SPLADE)
"""
