"""The operand guard, and what is said where CUDA cannot run; none of it needs a GPU."""

import subprocess
import sys

import pytest

from ds4.cuda.device import Device, Operand, check_operands
from ds4.errors import DeviceError


def test_operands_of_one_device_pass_the_guard():
    check_operands("layer 3 attend", 1, [Operand("q", 1), Operand("kv", 1)])


def test_an_operand_of_another_device_is_named_with_both_devices():
    with pytest.raises(DeviceError) as caught:
        check_operands("layer 3 attend", 1, [Operand("q", 1), Operand("kv", 0)])
    text = str(caught.value)
    assert "layer 3 attend" in text
    assert "operand kv is on device 0" in text
    assert "launch is on device 1" in text


class _Array:
    def __init__(self, ordinal):
        self.ordinal = ordinal


class _TwoDevices(Device):
    def ordinal_of(self, operand):
        return operand.ordinal if isinstance(operand, _Array) else None


class _Kernel:
    """Stands for a `cuda.jit` dispatcher: records its launches."""

    def __init__(self):
        self.launches = []

    def __getitem__(self, configuration):
        return lambda *arguments: self.launches.append((configuration, arguments))


def test_every_bound_launch_is_guarded_before_it_can_run():
    device, kernel = _TwoDevices(1, "test"), _Kernel()
    here, there = _Array(1), _Array(0)
    with pytest.raises(DeviceError, match="operand 1 is on device 0"):
        device.bind("bad", kernel, (1,), 32, (here, there, 7))
    assert kernel.launches == []
    device.run([device.bind("good", kernel, (2,), 64, (here, 7))])
    assert kernel.launches == [(((2,), 64, 0), (here, 7))]


def test_a_launch_is_configured_anew_for_another_stream():
    device, kernel = _TwoDevices(0, "test"), _Kernel()
    launch = device.bind("any", kernel, (1,), 32, (1,))
    for stream in ("a", "a", "b", "a"):
        launch.enqueue(stream)
    assert [configuration[2] for configuration, _ in kernel.launches] == ["a", "a", "b", "a"]


def test_backend_cuda_without_packages_or_device_says_what_is_missing():
    code = (
        "from ds4.api import open_model\n"
        "from ds4.errors import ConfigError\n"
        "try:\n"
        "    open_model('tests/data/v4-tiny-f32.gguf', backend='cuda').close()\n"
        "except ConfigError as error:\n"
        "    print('refused:', error)\n"
        "else:\n"
        "    print('opened')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    if done.stdout.startswith("opened"):
        pytest.skip("this machine has a CUDA device")
    assert "backend cuda needs" in done.stdout
    assert "ds4[cuda]" in done.stdout or "device" in done.stdout


def test_auto_takes_the_cpu_for_small_files():
    from ds4.api import open_model

    with open_model("tests/data/v4-tiny-f32.gguf") as model:
        assert model.backend == "cpu"
