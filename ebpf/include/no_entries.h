// SPDX-License-Identifier: Apache-2.0
// Stands in for the generated programs when the sources are compiled without a library to trace (tracepoint.h).
