// Attention on tensor cores with dropout and no other option.

#include "common.cuh"
#include "pair.cuh"
#include "tensor_cores.cuh"
#include "flash.cuh"

FLASH(64_dropout, 64, false, true, 2, 2)
FLASH(128_dropout, 128, false, true, 2, 3)
