"""The store: artifacts in a local folder or in a cloud, whose parts are committed one at a time.

sealed_json       the JSON documents of an artifact: records of parts, fingerprints, what pins a draft
artifact          complete artifacts, for reading
draft             artifacts that are being written, and the commit
keys              keys of artifacts, KIND/NAME
store             opens, creates, lists and removes the artifacts of a store
chain             artifacts that grow by generations, as one sequence of rows
conflicts         describes why a name of the store is taken
model_artifacts   models/NAME: a Hugging Face folder, file by file; checkpoints
live_release      serving/current.json, which names the live release
result_files      files and folders of results that appear whole
"""
