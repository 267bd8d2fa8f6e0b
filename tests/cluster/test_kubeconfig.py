"""Kubeconfigs as people have them: contexts, namespaces, users and credential plugins."""

from __future__ import annotations

import sys

import pytest
import yaml

from worldsize.cluster.api.client import Cluster
from worldsize.errors import UserError

SERVER = {"server": "http://127.0.0.1:9"}


API = "client.authentication.k8s.io/v1"


def plugin(code):
    """A user whose credentials come from this Python program."""
    return {"exec": {"apiVersion": API, "command": sys.executable, "args": ["-c", code]}}


def answering(status):
    return f"import json; print(json.dumps(dict(apiVersion={API!r}, kind='ExecCredential', status={status!r})))"


def test_a_credential_plugin_that_is_not_installed_is_an_error_with_its_name(use, capsys):
    missing = {"apiVersion": API, "command": "no-such-auth-plugin", "installHint": "Install it"}
    with pytest.raises(UserError, match=r"plugin no-such-auth-plugin of the kubeconfig's user u failed: .*\nInstall it"):
        use(SERVER, exec=missing)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import sys; sys.exit('token expired: run login')", "returned 1. token expired: run login"),
        ("print('no JSON')", "failed to decode process output"),
        (answering({}), "missing token or clientCertificateData"),
    ],
)
def test_a_credential_plugin_that_fails_is_an_error_with_its_message(use, code, message):
    with pytest.raises(UserError) as error:
        use(SERVER, **plugin(code))
    assert sys.executable in str(error.value) and message in str(error.value)


def test_a_credential_plugins_token_is_sent(use):
    assert use(SERVER, **plugin(answering({"token": "t"})))._credentials() == {"authorization": "Bearer t"}


def rewrite(tmp_path, change):
    path = tmp_path / "kubeconfig"
    content = yaml.safe_load(path.read_text())
    change(content)
    path.write_text(yaml.safe_dump(content))


@pytest.mark.parametrize("current", [None, "deleted"])
def test_a_context_that_is_given_needs_no_current_one(use, tmp_path, current):
    use(SERVER)
    rewrite(
        tmp_path, lambda content: content.pop("current-context") and current and content.update({"current-context": current})
    )
    assert Cluster("c").server == SERVER["server"]
    with pytest.raises(UserError, match=f"the kubeconfig has no .*{current or 'current'}.*; pass --context, one of: c"):
        Cluster()
    with pytest.raises(UserError, match="the kubeconfig has no context 'absent'; pass --context, one of: c"):
        Cluster("absent")


def test_an_empty_namespace_is_the_default_one(use, tmp_path):
    use(SERVER)
    rewrite(tmp_path, lambda content: content["contexts"][0]["context"].update(namespace=""))
    assert Cluster().namespace == "default"


def test_the_proxy_of_a_cluster_is_used(use, monkeypatch):
    """Also with versions of the client that do not read it."""
    import kubernetes.config

    load = kubernetes.config.load_kube_config

    def without_proxy(**options):
        load(**options)
        options["client_configuration"].proxy = None

    monkeypatch.setattr(kubernetes.config, "load_kube_config", without_proxy)
    assert use(SERVER | {"proxy-url": "http://proxy.example:3128"})._settings.proxy == "http://proxy.example:3128"


@pytest.mark.parametrize("option", ["--context", "--namespace"])
def test_an_empty_option_is_refused(use, option):
    use(SERVER)
    with pytest.raises(UserError, match=f"{option} is empty"):
        Cluster(**{option.removeprefix("--"): ""})


def test_a_context_whose_user_does_not_exist_is_an_error(use, tmp_path):
    use(SERVER)
    rewrite(tmp_path, lambda content: content.update(users=[]))
    with pytest.raises(UserError, match="context 'c' has the user 'u', which the kubeconfig does not define"):
        Cluster()


@pytest.mark.parametrize("namespace", ["Team A", "a/b", "a_b", "a" * 64])
def test_a_namespace_that_cannot_exist_is_refused_before_anything_is_asked(use, namespace):
    with pytest.raises(UserError, match=r"--namespace '.*': use at most 63 lowercase letters, digits and '-'"):
        use(SERVER, namespace)
