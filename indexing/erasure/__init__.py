"""Removes passages and their vectors from the corpus, embeddings, indexes and runs of a store.

kinds             what an erasure does with the artifacts of each kind
part_changes      the parts that hold erased passages, and how each is written again
replacing         replaces parts of a complete artifact, so that an interruption leaves the old or the new manifest
receipts          the receipts of erasures, which `verify` checks
progress          the plan of the erasure in progress, which one command at a time carries out
erasing           plans and carries out an erasure
"""
