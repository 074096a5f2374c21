"""Parts of the training jobs. Options and artifacts are checked before any training, and without Ray.

training_options   options of the training jobs
run_options        options of all of them: steps, workers, checkpoints, quality during training
resolving          from the options of train_retriever to those of the library
retriever_run      trains a retriever, or each run of a sweep
reranker_run       trains a cross-encoder
pretraining_run    pretrains a backbone, or a prompt over one
opening            opens the artifacts of a training run, and checks that all of them fit
start_prompt       the prompt of --init, from which training starts
training_runs      runs a training job: workers, checkpoints, progress lines, curves
serving            warnings about artifacts that one server cannot serve together with a new prompt
curves             TensorBoard events and plots of a run
sweep              the grid of a sweep's runs, and the work that makes sweeps/NAME: one part for each run
sweep_report       the table and the picture of a sweep
"""
