"""Copies: passages whose title and text equal those of another passage."""
