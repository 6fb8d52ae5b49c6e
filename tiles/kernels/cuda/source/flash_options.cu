// Attention on tensor cores with options: windows, documents, caps, biases and dropout.

#include "common.cuh"
#include "pair.cuh"
#include "tensor_cores.cuh"
#include "flash.cuh"

FLASH(64, 64, true, true, 2, 2)
FLASH(128, 128, true, true, 2, 3)
