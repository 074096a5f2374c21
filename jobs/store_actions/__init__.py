"""The actions of the job store.

inspecting        list and show
removing          remove and gc
transfer          export, copy and import-model
store_options     options of `store`
"""
