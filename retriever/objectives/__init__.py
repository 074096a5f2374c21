"""Terms of the loss of a dual encoder: each module has a term with its options, its equation and its batch outputs.

Modules of terms and of losses import torch within functions, because their options are options of a job too.

loss_term             the interface of a term, and the batch of a step while terms add to it
terms                 the registry of terms, in the order of summation
pair_term             judged pairs: contrastive losses and distillation
category_term         positives with a common category (Topic-DPR)
topic_term            passages under the prompts of several topics (Topic-DPR)
divergence_term       the regulariser of computed prompts (HYPER)
flops_term            the regulariser of sparse vectors (SPLADE)
loss_function         the interface of a loss of judged pairs, a value of the option `loss`
pair_losses           the registry of these losses, and the options of the loss
contrastive           contrastive losses, of one side and symmetric
distillation          losses that distil the scores of a teacher
learned_temperature   a temperature that is trained with the model
tune_options          the options of a training run, with those of its terms
"""
