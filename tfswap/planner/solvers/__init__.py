"""One policy per file for what leaves the device and when: published ones, tfswap's own, an exact one."""
