"""Condenser's head (Gao and Callan 2021), which is trained with a backbone and saved with it.

head    the head: its layers, and its files in a model folder
"""
