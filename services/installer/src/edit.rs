//! Edits of a network configuration list that leave every byte alone but those of the entries they add or take out.

use crate::entry::{Entry, Layout, PLUGIN};
use crate::network::{Invalid, List, Plugin, Single, span};

/// Name of the plugin whose place we take on request.
pub(crate) const ISTIO: &str = "istio-cni";

/// The list as it is to be cannot be made.
#[derive(Debug, thiserror::Error)]
pub(crate) enum EditError {
    #[error(transparent)]
    Invalid(#[from] Invalid),
    #[error("its entry cannot be written as JSON")]
    Render(#[source] serde_json::Error),
}

/// What is left of a list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Rest {
    /// It had none of the entries.
    Untouched,
    /// The list without them.
    Text(String),
    /// Nothing but them was in it.
    Nothing,
}

/// The list with our entry as its last one, once, and without the entries of `displaced`.
pub(crate) fn insert(text: &str, entry: &Entry, displaced: &[&str]) -> Result<String, EditError> {
    let list = List::parse(text)?;
    let plugins = list
        .plugins
        .as_deref()
        .ok_or(Invalid::Missing { key: "plugins" })?;
    let array = array_span(text, &list);
    let (separator, layout) = layout(text, plugins, array.start);
    let new = entry.render(&layout).map_err(EditError::Render)?;
    let kept = keep(plugins, &[&[PLUGIN], displaced].concat());
    let mut edited = text[..array.start].to_owned();
    match (kept.first(), plugins.first()) {
        (Some(_), Some(_)) => {
            edited.push_str(&join(text, plugins, &kept, array.start));
            edited.push_str(&separator);
        }
        (None, Some(first)) => edited.push_str(&text[array.start..span(text, first.raw).start]),
        (_, None) => edited.push('['),
    }
    edited.push_str(&new);
    edited.push_str(tail(text, plugins));
    Ok(edited)
}

/// The list without the entries of `types`.
pub(crate) fn remove(text: &str, types: &[&str]) -> Result<Rest, Invalid> {
    let list = List::parse(text)?;
    let Some(plugins) = list.plugins.as_deref() else {
        return Ok(Rest::Untouched);
    };
    let kept = keep(plugins, types);
    if kept.len() == plugins.len() {
        return Ok(Rest::Untouched);
    }
    if kept.is_empty() {
        return Ok(Rest::Nothing);
    }
    let array = array_span(text, &list);
    let mut edited = text[..array.start].to_owned();
    edited.push_str(&join(text, plugins, &kept, array.start));
    edited.push_str(tail(text, plugins));
    Ok(Rest::Text(edited))
}

/// A single plugin as the list that libcni makes of it, with our entry: name and version stay, because the name keys
/// the state of address management. Where they are missing it gets what Istio's agent gives it.
pub(crate) fn list_from_single(text: &str, single: &Single, entry: &Entry) -> Result<String, EditError> {
    let name = single.name.as_deref().filter(|name| !name.is_empty());
    let version = single.version.as_deref().filter(|version| !version.is_empty());
    let members = [
        ("cniVersion", quoted(version.unwrap_or("0.3.1"))?),
        ("name", quoted(name.unwrap_or("k8s-pod-network"))?),
    ];
    write_list(&members, &[text.trim()], entry)
}

/// A list whose plugins come partly or all from files, as one that has them all inline, in the order in which libcni
/// appends them, and then our entry.
pub(crate) fn inline_drop_ins(
    list: &List<'_>,
    drop_ins: &[&str],
    entry: &Entry,
    displaced: &[&str],
) -> Result<String, EditError> {
    let mut members = Vec::new();
    for (key, value) in &list.object.0 {
        if key != "plugins" && key != "loadOnlyInlinedPlugins" {
            members.push((key.as_ref(), value.get().to_owned()));
        }
    }
    members.push(("loadOnlyInlinedPlugins", "true".to_owned()));
    let inline = list.plugins.as_deref().unwrap_or_default();
    let unwanted = [&[PLUGIN], displaced].concat();
    let mut plugins: Vec<&str> = keep(inline, &unwanted)
        .into_iter()
        .map(|index| inline[index].raw)
        .collect();
    for text in drop_ins {
        if !unwanted.contains(&Single::parse(text)?.kind.as_str()) {
            plugins.push(text.trim());
        }
    }
    write_list(&members, &plugins, entry)
}

fn write_list(members: &[(&str, String)], plugins: &[&str], entry: &Entry) -> Result<String, EditError> {
    let layout = Layout::Lines {
        prefix: "    ".to_owned(),
        step: "  ".to_owned(),
    };
    let new = entry.render(&layout).map_err(EditError::Render)?;
    let mut text = "{\n".to_owned();
    for (key, value) in members {
        let key = quoted(key)?;
        text.extend(["  ", &key, ": ", value, ",\n"]);
    }
    text.push_str("  \"plugins\": [\n");
    for plugin in plugins {
        text.extend(["    ", plugin, ",\n"]);
    }
    text.extend(["    ", &new, "\n  ]\n}\n"]);
    Ok(text)
}

fn quoted(text: &str) -> Result<String, EditError> {
    serde_json::to_string(text).map_err(EditError::Render)
}

/// Positions of the plugins that are none of `types`.
fn keep(plugins: &[Plugin<'_>], types: &[&str]) -> Vec<usize> {
    let foreign =
        |(index, plugin): (usize, &Plugin<'_>)| (!types.contains(&plugin.kind.as_str())).then_some(index);
    plugins.iter().enumerate().filter_map(foreign).collect()
}

fn array_span(text: &str, list: &List<'_>) -> std::ops::Range<usize> {
    list.object
        .get("plugins")
        .map_or(0..0, |raw| span(text, raw.get()))
}

/// From the array's bracket to the end of the last kept plugin. Each but the first keeps the separator before it.
fn join(text: &str, plugins: &[Plugin<'_>], kept: &[usize], start: usize) -> String {
    let place = |index: usize| span(text, plugins[index].raw);
    let mut joined = text[start..place(0).start].to_owned();
    for (position, &index) in kept.iter().enumerate() {
        if position > 0 {
            joined.push_str(&text[place(index - 1).end..place(index).start]);
        }
        joined.push_str(plugins[index].raw);
    }
    joined
}

/// From the end of the last plugin to the end of the document.
fn tail<'a>(text: &'a str, plugins: &[Plugin<'_>]) -> &'a str {
    plugins
        .last()
        .map_or("]}", |last| &text[span(text, last.raw).end..])
}

/// What stands between two plugins, and how a plugin is laid out.
fn layout(text: &str, plugins: &[Plugin<'_>], start: usize) -> (String, Layout) {
    let place = |plugin: &Plugin<'_>| span(text, plugin.raw);
    let separator = match plugins {
        [.., before, last] => text[place(before).end..place(last).start].to_owned(),
        [only] => format!(",{}", &text[start + 1..place(only).start]),
        [] => ",".to_owned(),
    };
    let Some((_, line)) = separator.rsplit_once('\n') else {
        return (separator, Layout::Compact);
    };
    let prefix: String = line
        .chars()
        .map(|c| if c.is_whitespace() { c } else { ' ' })
        .collect();
    let step = if prefix.contains('\t') {
        "\t".to_owned()
    } else {
        " ".repeat((prefix.len() / 2).clamp(1, 8))
    };
    (separator, Layout::Lines { prefix, step })
}

#[cfg(test)]
mod tests;
