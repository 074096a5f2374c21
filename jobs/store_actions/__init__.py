"""The actions of the job store.

inspecting        list and show
removing          remove and gc
erase_option      the option erase of import-corpus
watch_option      the option watch of import-corpus
transfer          export, copy and import-model
store_options     options of `store`
"""
