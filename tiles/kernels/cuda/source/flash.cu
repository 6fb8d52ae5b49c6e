// Attention on tensor cores without options: no window, documents, cap, bias or dropout (`flash_options.cu` has them, and takes much longer to compile).

#include "common.cuh"
#include "pair.cuh"
#include "flash.cuh"

FLASH(64_plain, 64, true, 3, 3)
FLASH(128_plain, 128, true, 2, 3)
