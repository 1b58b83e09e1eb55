// Stands in for CUDA's own header; everything it would declare is in device.h, included first.
#pragma once
