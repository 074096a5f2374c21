"""What a process needs of its machine: memory, compiled kernels, optional packages, temporary folders and threads.

memory              the free memory of this process
native              compiles C++ kernels on first use, and loads them (registers.h, for all kernels)
extras              optional packages, and the extras that install them
temporary_folders   temporary folders, which a later process removes if theirs was killed
forks               refuses work that would wait forever in a forked process
"""
