// What other libraries, csrc/codecs and Python, may call of one: all else is hidden.

#ifndef TFSWAP_OPS_CSRC_CORE_EXPORT_H_
#define TFSWAP_OPS_CSRC_CORE_EXPORT_H_

#define TFSWAP_EXPORT __attribute__((visibility("default")))
#define TFSWAP_C_API extern "C" TFSWAP_EXPORT

#endif  // TFSWAP_OPS_CSRC_CORE_EXPORT_H_
