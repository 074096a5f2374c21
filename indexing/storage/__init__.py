"""Where a store is: a local folder or a bucket of a cloud, and the cache of a node.

storage        a few operations that commit atomically, on a folder
remote         what the storages of all clouds share
s3             the same operations on S3
object_store   the same operations on Google Cloud Storage and Azure
cache          the cache of a node: parts that were read from a cloud
"""
