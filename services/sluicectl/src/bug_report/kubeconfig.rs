//! The plugin's kubeconfig: all of it but the token, of which only what it says about itself is told.

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use serde_json::{Value, json};

use super::redact::Redactor;

/// The claims that are no secret (RFC 7519 section 4.1).
const CLAIMS: [&str; 6] = ["iss", "sub", "aud", "exp", "nbf", "iat"];

/// The kubeconfig with each token replaced by its length and claims. Its tokens are known to `redactor` from now on.
/// `None`: it is not JSON, so that nobody can tell what of it is secret.
pub(crate) fn without_tokens(text: &[u8], redactor: &mut Redactor) -> Option<String> {
    let mut value: Value = serde_json::from_slice(text).ok()?;
    for user in value.get_mut("users")?.as_array_mut()? {
        // Other ways to log in are not ours to read: nothing of them is shown.
        let user = user.get_mut("user")?;
        let token = user.get("token").and_then(Value::as_str).map(str::to_owned);
        *user = token.map_or_else(
            || json!({ "other": "left out" }),
            |token| {
                redactor.know(&token);
                json!({ "bearer": describe(&token) })
            },
        );
    }
    serde_json::to_string_pretty(&value).ok()
}

fn describe(token: &str) -> Value {
    json!({ "length": token.len(), "claims": claims(token) })
}

fn claims(token: &str) -> Option<Value> {
    let payload = URL_SAFE_NO_PAD.decode(token.split('.').nth(1)?).ok()?;
    let mut all: Value = serde_json::from_slice(&payload).ok()?;
    let told = CLAIMS
        .iter()
        .filter_map(|claim| Some(((*claim).to_owned(), all.get_mut(claim)?.take())));
    Some(Value::Object(told.collect()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_replaced_by_what_it_says_of_itself() {
        let payload =
            URL_SAFE_NO_PAD.encode(r#"{"exp":1790000000,"sub":"system:serviceaccount:a:b","jti":"x"}"#);
        let token = format!("eyJhbGciOiJSUzI1NiJ9.{payload}.c2lnbmF0dXJl");
        let kubeconfig = json!({
            "clusters": [{ "cluster": { "server": "https://10.0.0.1" } }],
            "users": [
                { "name": "sluice-plugin", "user": { "token": token } },
                { "name": "other", "user": { "client-key-data": "planted" } },
            ],
        });
        let mut redactor = Redactor::default();
        let text = without_tokens(kubeconfig.to_string().as_bytes(), &mut redactor).unwrap();
        for (part, there) in [
            ("1790000000", true),
            ("system:serviceaccount:a:b", true),
            ("https://10.0.0.1", true),
            (&*token, false),
            ("jti", false),
            ("planted", false),
        ] {
            assert_eq!(text.contains(part), there, "{part}: {text}");
        }
        assert_eq!(redactor.apply(format!("x {token}").as_bytes()), "x [REDACTED]");
    }

    #[test]
    fn what_is_no_json_is_not_shown() {
        let mut redactor = Redactor::default();
        for text in ["users:\n- user: {token: x}\n", "[]", r#"{"users":[{}]}"#] {
            assert_eq!(without_tokens(text.as_bytes(), &mut redactor), None);
        }
    }
}
