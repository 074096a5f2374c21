"""Encoders as other programs call them.

mteb_encoder   the encoder protocol of the package mteb

The other program's package is imported when an adapter is made; importing these modules does not need it.
"""
