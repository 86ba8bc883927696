"""`tfswap watch` and `tfswap.watch`: what holds the device's memory at its peak. Nothing is changed.

`watch` chooses when to record the allocator's events, `naming` finds whose the chunks at the highest moment are, and
`costs` what a limit would cost.
"""
