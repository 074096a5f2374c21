"""The store: artifacts in a local folder or on S3, whose parts are committed one at a time.

storage           a folder or S3 behind a few operations that commit atomically
s3                the same operations on S3
cache             the cache of a node: parts that were read from S3
sealed_json       the JSON documents of an artifact: records of parts, fingerprints, what pins a draft
artifact          artifacts and drafts, and the commit
keys              keys of artifacts, KIND/NAME
store             opens, creates, lists and removes the artifacts of a store
chain             artifacts that grow by generations, as one sequence of rows
conflicts         describes why a name of the store is taken
model_artifacts   models/NAME: a Hugging Face folder, file by file; checkpoints
live_release      serving/current.json, which names the live release
retention         how long other releases are kept
result_files      files and folders of results that appear whole
verification      hashes every byte again
"""
