"""The store: artifacts in a local folder or in a cloud, whose parts are committed one at a time.

storage           a few operations that commit atomically, on a folder
remote            what the storages of all clouds share
s3                the same operations on S3
object_store      the same operations on Google Cloud Storage and Azure
cache             the cache of a node: parts that were read from a cloud
sealed_json       the JSON documents of an artifact: records of parts, fingerprints, what pins a draft
artifact          artifacts and drafts, and the commit
keys              keys of artifacts, KIND/NAME
store             opens, creates, lists and removes the artifacts of a store
chain             artifacts that grow by generations, as one sequence of rows
conflicts         describes why a name of the store is taken
model_artifacts   models/NAME: a Hugging Face folder, file by file; checkpoints
live_release      serving/current.json, which names the live release
result_files      files and folders of results that appear whole
"""
