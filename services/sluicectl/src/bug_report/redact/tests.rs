use proptest::prelude::*;

use super::*;

const SECRET: &str = "planted-4711-secret";
const JWT: &str = "eyJhbGciOiJSUzI1NiIsImtpZCI6IjEifQ.eyJzdWIiOiJzeXN0ZW0ifQ.c2lnbmF0dXJl-_";

fn redacted(text: &str) -> String {
    Redactor::default().apply(text.as_bytes())
}

#[test]
fn values_of_secret_keys_go_and_everything_else_stays() {
    for (text, expected) in [
        (
            r#"{"token":"planted-4711-secret","name":"x"}"#,
            r#"{"token":"[REDACTED]","name":"x"}"#,
        ),
        (
            r#"{"token" : "planted\"-4711-secret"}"#,
            r#"{"token" : "[REDACTED]"}"#,
        ),
        (
            "    token: planted-4711-secret\n    name: x\n",
            "    token: [REDACTED]\n    name: x\n",
        ),
        (
            "  client-key-data: planted-4711-secret\n",
            "  client-key-data: [REDACTED]\n",
        ),
        (
            "  - password: 'planted-4711-secret'\n",
            "  - password: '[REDACTED]'\n",
        ),
        (
            "DB_PASSWORD=planted-4711-secret next",
            "DB_PASSWORD=[REDACTED] next",
        ),
        (
            "--api-token=planted-4711-secret --port=1",
            "--api-token=[REDACTED] --port=1",
        ),
        (
            r#""{\"accessToken\":\"planted-4711-secret\",\"a\":\"b\"}""#,
            r#""{\"accessToken\":\"[REDACTED]\",\"a\":\"b\"}""#,
        ),
        ("clientSecret: planted-4711-secret", "clientSecret: [REDACTED]"),
        (
            "token: |\n  planted-4711\n  -secret\nnext: 1\n",
            "token: [REDACTED]\nnext: 1\n",
        ),
        (
            r#"{"serviceAccountToken":{"path":"token","expirationSeconds":3607}}"#,
            r#"{"serviceAccountToken":{"path":"token","expirationSeconds":3607}}"#,
        ),
        (
            "automountServiceAccountToken: false\n",
            "automountServiceAccountToken: false\n",
        ),
        ("secret:\nname: x\n", "secret:\nname: x\n"),
        ("pod team-a/web-0: enrolled", "pod team-a/web-0: enrolled"),
    ] {
        let output = redacted(text);
        assert_eq!(output, expected);
        assert!(!output.contains("4711"), "{output}");
    }
}

#[test]
fn forms_that_only_secrets_have_go_wherever_they_stand() {
    let key = "-----BEGIN EC PRIVATE KEY-----\nplanted\n4711\n-----END EC PRIVATE KEY-----";
    let certificate = "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----";
    for (text, expected) in [
        (format!("GET / {JWT} done"), "GET / [REDACTED] done".to_owned()),
        (format!("x={JWT}"), "x=[REDACTED]".to_owned()),
        (format!("\"{JWT}\""), "\"[REDACTED]\"".to_owned()),
        (STANDARD.encode(JWT), REDACTED.to_owned()),
        (
            format!("Bearer {SECRET}, then"),
            "Bearer [REDACTED], then".to_owned(),
        ),
        ("the bearer of news".to_owned(), "the bearer of news".to_owned()),
        (
            format!("https://user:{SECRET}@host/path"),
            "https://[REDACTED]@host/path".to_owned(),
        ),
        (
            "https://10.0.0.1:443/x@y".to_owned(),
            "https://10.0.0.1:443/x@y".to_owned(),
        ),
        (
            format!("{certificate}\n{key}\nafter"),
            format!("{certificate}\n[REDACTED]\nafter"),
        ),
        (key.replace('\n', "\\n"), REDACTED.to_owned()),
        (
            "-----BEGIN PRIVATE KEY-----\nplanted 4711 without an end".to_owned(),
            REDACTED.to_owned(),
        ),
    ] {
        assert_eq!(redacted(&text), expected);
    }
}

#[test]
fn a_known_secret_goes_in_every_form() {
    let mut redactor = Redactor::default();
    redactor.know(&format!("{SECRET}\n"));
    redactor.know("short");
    let text = format!("a {SECRET}b {} short", STANDARD.encode(SECRET));
    assert_eq!(redactor.apply(text.as_bytes()), "a [REDACTED]b [REDACTED] short");
}

proptest! {
    /// Whatever stands around it, and bytes that are no text.
    #[test]
    fn a_known_secret_never_stays(before in any::<Vec<u8>>(), after in any::<Vec<u8>>()) {
        let mut redactor = Redactor::default();
        redactor.know(SECRET);
        let text = [&before[..], SECRET.as_bytes(), &after[..]].concat();
        prop_assert!(!redactor.apply(&text).contains(SECRET));
    }

    #[test]
    fn a_jwt_never_stays(before in "[ -~\n\t]{0,40}[ \"'\n=:(]", after in "[ \"'\n,)][ -~\n\t]{0,40}") {
        let output = redacted(&format!("{before}{JWT}{after}"));
        prop_assert!(!output.contains("c2lnbmF0dXJl"), "{output}");
    }

    #[test]
    fn text_without_secrets_stays(text in "[a-z0-9/ \n]{0,80}") {
        prop_assert_eq!(redacted(&text), text);
    }
}
