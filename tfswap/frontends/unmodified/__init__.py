"""Programs that do not import tfswap, under a memory limit: `tfswap run`, and the hook of TFSWAP_MEMORY_LIMIT.

The process is that of plain Python. `launch` replaces itself by it, and Python's own start runs
`startup/sitecustomize.py`, which watches for imports of TensorFlow and Keras. `functions` and `keras` are imported by
the first call that may train, and put steps under the limit.
"""
