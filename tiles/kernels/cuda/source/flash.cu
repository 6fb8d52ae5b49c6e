// Attention on tensor cores without options: no window, documents, cap, bias or dropout. `flash_dropout.cu` has dropout alone, `flash_options.cu` all,
// which takes much longer to compile.

#include "common.cuh"
#include "pair.cuh"
#include "tensor_cores.cuh"
#include "flash.cuh"

FLASH(64_plain, 64, false, false, 3, 3)
FLASH(128_plain, 128, false, false, 2, 3)
