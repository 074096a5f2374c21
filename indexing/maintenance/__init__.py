"""Maintenance of a store: checks, copies, and the removal of what nothing needs.

verification      hashes every byte again
retention         how long releases that are not live are kept
copying           copies artifacts to another store
"""
