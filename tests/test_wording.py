from kernelswap.wording import nearest


def test_nearest() -> None:
    assert nearest("cutlas", ["cutlass", "triton"]) == "did you mean `cutlass`?"
    assert nearest("zzz", ["b", "a"]) == "use one of: a, b"
    assert nearest("zzz", []) == "there is none yet; write its file first"
