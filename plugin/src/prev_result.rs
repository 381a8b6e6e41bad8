//! The addresses in the result of the plugins before us. The result itself is never rebuilt, only passed on.

use std::net::IpAddr;

use serde::Deserialize;

/// The result has not the form of CNI spec section 5.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PrevResultError {
    #[error("prevResult is malformed")]
    Shape(#[source] serde_json::Error),
    #[error("prevResult: ips[{index}].address {value:?} is not an address with a prefix length")]
    Address { index: usize, value: String },
}

// Go writes an empty list as null, hence the options.
#[derive(Debug, Deserialize)]
struct View<'a> {
    #[serde(borrow, default)]
    interfaces: Option<Vec<Interface<'a>>>,
    #[serde(borrow, default)]
    ips: Option<Vec<Ip<'a>>>,
}

#[derive(Debug, Deserialize)]
struct Interface<'a> {
    #[serde(borrow)]
    name: std::borrow::Cow<'a, str>,
    #[serde(borrow, default)]
    sandbox: std::borrow::Cow<'a, str>,
}

#[derive(Debug, Deserialize)]
struct Ip<'a> {
    #[serde(borrow)]
    address: std::borrow::Cow<'a, str>,
    interface: Option<i64>,
}

/// The addresses of `ifname` in the sandbox, in text form without prefix length.
///
/// An address that names no interface counts. When none is left, because some plugins count their interfaces
/// wrongly, all of them count: a probe address too many is better than one too few.
pub(crate) fn addresses(result: &str, ifname: &str) -> Result<Vec<String>, PrevResultError> {
    let view: View<'_> = serde_json::from_str(result).map_err(PrevResultError::Shape)?;
    let interfaces = view.interfaces.unwrap_or_default();
    let ips = view.ips.unwrap_or_default();
    let mut all = Vec::with_capacity(ips.len());
    let mut ours = Vec::with_capacity(ips.len());
    for (index, ip) in ips.iter().enumerate() {
        let address = ip.address.split('/').next().unwrap_or_default();
        let Ok(address) = address.parse::<IpAddr>() else {
            let value = ip.address.chars().take(64).collect();
            return Err(PrevResultError::Address { index, value });
        };
        let address = address.to_string();
        let named = ip.interface.map(|number| {
            let interface = usize::try_from(number)
                .ok()
                .and_then(|number| interfaces.get(number));
            interface.is_some_and(|interface| interface.name == ifname && !interface.sandbox.is_empty())
        });
        if named.unwrap_or(true) {
            ours.push(address.clone());
        }
        all.push(address);
    }
    Ok(if ours.is_empty() { all } else { ours })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_addresses_of_the_interface_count() {
        let result = r#"{"interfaces":[{"name":"veth1"},{"name":"eth0","sandbox":"/n"},{"name":"net1","sandbox":"/n"}],
            "ips":[{"address":"10.0.0.2/24","interface":1},{"address":"fd00::2/64"},{"address":"10.9.0.2/24","interface":2}]}"#;
        assert_eq!(addresses(result, "eth0").unwrap(), ["10.0.0.2", "fd00::2"]);
    }

    #[test]
    fn a_result_that_counts_its_interfaces_wrongly_still_gives_its_addresses() {
        let result = r#"{"interfaces":null,"ips":[{"address":"10.0.0.2/24","interface":7}]}"#;
        assert_eq!(addresses(result, "eth0").unwrap(), ["10.0.0.2"]);
        assert!(addresses(r#"{"ips":null}"#, "eth0").unwrap().is_empty());
    }

    #[test]
    fn what_is_not_an_address_is_named() {
        let error = addresses(r#"{"ips":[{"address":"10.0.0.2/24"},{"address":"x"}]}"#, "eth0").unwrap_err();
        assert_eq!(
            error.to_string(),
            "prevResult: ips[1].address \"x\" is not an address with a prefix length"
        );
    }
}
