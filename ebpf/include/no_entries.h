// SPDX-License-Identifier: Apache-2.0
// Stands for the generated programs where there is no library to make them for (tracepoint.h).
