"""Huawei Ascend: CANN's fused attention through torch-npu."""
