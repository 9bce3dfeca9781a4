// SPDX-License-Identifier: Apache-2.0
// Takes the place of the generated programs if there is no library to generate them for (tracepoint.h).
