// Everything that kernels use, for the emulator. Kernels include kvrs/portable.cuh, which includes this.
#pragma once
#include "arithmetic.h"
#include "integer.h"
#include "kernel.h"
#include "matrix.h"
#include "memory.h"
#include "thread.h"
#include "types.h"
#include "warp.h"
