"""Releases: sets of tasks that are served together, with their artifacts.

release_tasks   the tasks of a release, the sources that each serves, and the search that a request names
release         a release: its tasks, and the fingerprints of their artifacts
live            the live release and the ones before it, which serving/current.json names
planning        the release of the artifacts of a store
renewal         whether the store holds newer artifacts, and the release of these
artifacts       the artifacts of a release, opened for reading
"""
