/* paged.h: all of libpaged, the library without a model. libpaged-engine has paged/model.h and
 * paged/engine.h. */
#ifndef PAGED_PAGED_H
#define PAGED_PAGED_H

#include "paged/ascend.h"
#include "paged/base.h"
#include "paged/kv.h"
#include "paged/mem.h"
#include "paged/opencl.h"
#include "paged/ops.h"
#include "paged/plan.h"

#endif
