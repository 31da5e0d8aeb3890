//! The identity of a plan: SHA-256 over everything that decides codes.

use crate::plan::{LayerConstants, PlanSpec};
use serde_json::Value;
use sha2::{Digest, Sha256};
use std::fmt::Write;

/// Version of the packed layouts and of the encoding; a change of either gives every plan a new hash.
pub(crate) const LAYOUT_VERSION: u32 = 1;

/// 64 hex digits over the layout version, the canonical JSON and each array's name, dtype, shape and bytes.
/// The model's name, the window type and the report of a calibration stay out.
pub(crate) fn of_spec(spec: &PlanSpec) -> String {
    let mut json = serde_json::to_value(spec).expect("a spec has string keys and no failing serializer");
    if let Value::Object(fields) = &mut json {
        fields.remove("name");
        fields.remove("window_dtype");
        if let Some(Value::Object(calibration)) = fields.get_mut("calibration") {
            calibration.remove("report");
        }
    }
    let mut sha = Sha256::new();
    sha.update(LAYOUT_VERSION.to_le_bytes());
    sha.update(canonical(json).to_string());
    for (name, offset) in [("key_offset", &spec.key_offset), ("value_offset", &spec.value_offset)] {
        add_constants(&mut sha, spec, name, offset.as_ref());
    }
    for (name, array) in spec.named_arrays() {
        sha.update(format!("{name} float32 {:?}", array.shape));
        add_numbers(&mut sha, &array.values);
    }
    sha.finalize().iter().fold(String::with_capacity(64), |mut hex, byte| {
        write!(hex, "{byte:02x}").expect("writing to a string cannot fail");
        hex
    })
}

/// Whole numbers as integers, other floats as their bits; objects come sorted from `serde_json`.
fn canonical(value: Value) -> Value {
    match value {
        Value::Array(items) => items.into_iter().map(canonical).collect(),
        Value::Object(fields) => fields.into_iter().map(|(k, v)| (k, canonical(v))).collect(),
        Value::Number(n) => match n.as_f64().filter(|_| n.is_f64()) {
            Some(x) if x.fract() == 0.0 && x.abs() < 9e15 => Value::from(x as i64),
            Some(x) => Value::from(format!("f64:{:016x}", x.to_bits())),
            None => Value::Number(n),
        },
        other => other,
    }
}

fn add_constants(sha: &mut Sha256, spec: &PlanSpec, name: &str, offset: Option<&LayerConstants>) {
    for (i, constants) in offset.into_iter().flatten().enumerate() {
        let Some(constants) = constants else { continue };
        let heads = spec.shape.layers[i].kv_heads;
        sha.update(format!("{name}.{i} float32 [{heads}, {}]", constants.len() / heads));
        add_numbers(sha, constants);
    }
}

fn add_numbers(sha: &mut Sha256, numbers: &[f32]) {
    for x in numbers {
        sha.update(x.to_le_bytes());
    }
}
