// SPDX-License-Identifier: Apache-2.0
// The whole extension. torch's headers take longest to read: one translation unit reads them once.
#include "arguments.cpp"
#include "backend.cpp"
#include "collectives.cpp"
#include "device_copies.cpp"
#include "device_operation.cpp"
#include "module.cpp"
#include "plan_cache.cpp"
#include "poster.cpp"
#include "sparse.cpp"
#include "stand_in.cpp"
#include "symmetric.cpp"
#include "work.cpp"
