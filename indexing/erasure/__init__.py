"""Erases passages from a store: no artifact holds their texts, or what was computed from them, any more.

kinds             what an erasure does with the artifacts of each kind
part_changes      the parts that hold erased passages, and how each is written again
replacing         replaces parts of a complete artifact, so that an interruption leaves the old or the new manifest
receipts          the plan of an erasure that is in progress, and the receipts, which `verify` checks
erasing           plans and carries out an erasure
"""
