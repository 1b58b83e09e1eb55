"""What Nsight Compute writes, for tests."""

from __future__ import annotations

# Two kernels of one chain. The form is that of --csv --page raw --print-units base; the numbers are
# made up.
LOG = """\
==PROF== Connected to process 4711 (/usr/bin/python3.12)
==PROF== Profiling "main_0" - 0: 0%....50%....100% - 1 pass
==PROF== Profiling "main_1" - 1: 0%....50%....100% - 1 pass
==PROF== Disconnected from process 4711
"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size",\
"Grid Size","Device","CC","dram__bytes_read.sum","dram__bytes_write.sum","gpu__time_duration.sum",\
"l1tex__m_xbar2l1tex_read_bytes.sum","lts__t_bytes.sum"
"","","","","","","","","","","","byte","byte","ns","byte","byte"
"0","4711","python3.12","127.0.0.1","main_0","1","7","(384, 1, 1)","(128, 1, 1)","0","9.0",\
"181,403,648","4,096","71,904","201,326,592","210,000,000"
"1","4711","python3.12","127.0.0.1","main_1","1","7","(384, 1, 1)","(116, 1, 1)","0","9.0",\
"90,701,824","1,024","40,032","100,663,296","105,000,000"
"""
# As Nsight Compute 2025.3 answers for a kernel that the driver did not launch.
FAILED = (
    LOG.replace(
        '"181,403,648","4,096","71,904","201,326,592","210,000,000"', '"nan","nan"' + ',"nan"' * 3
    )
    + """\
==ERROR== An error was reported by the driver:
==ERROR== LaunchFailed
"""
)
DENIED = """\
==PROF== Connected to process 4711 (/usr/bin/python3.12)
==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU Performance \
Counters on the target device 0. For instructions on enabling permissions and to get more \
information see https://developer.nvidia.com/ERR_NVGPUCTRPERM
==PROF== Disconnected from process 4711
"""
